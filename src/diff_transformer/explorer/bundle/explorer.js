/* sources 2027b241020f2c7481184dc2ecb9aa1bcd89d6960ae439b0c455d485cab06cdf */
/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */
var C,vt,yr,J,We,Oe,wt,Se,yt,Ve,Ge,kr,_e=Symbol.for("pv"),ze={},Te=[],Mr=/^m(i|n|o|s|text|space)$/,Ke=Array.isArray,Je=Te.slice,te=Object.assign;function ee(t){t&&t.parentNode&&t.remove()}function Xe(t,e,r){var n,a,o,s={},i=arguments.length;for(o in e)o=="key"?n=e[o]:o=="ref"&&typeof t!="function"?a=e[o]:s[o]=e[o];return i>2&&(s.children=i>3?Je.call(arguments,2):r),fe(t,s,n,a,null)}function fe(t,e,r,n,a){var o={type:t,props:e,key:r,ref:n,__k:null,__:null,__b:0,__e:null,__c:null,constructor:_e,__v:a||++vt,__i:-1,__u:0};return!a&&C.vnode&&C.vnode(o),o}function Ee(t){return t.children}function me(t,e){this.props=t,this.context=e,this.__g=0}function X(t,e){if(e==null)return t.__&&X(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:X(t)}function Ar(t){var e,r=t.__v,n=r.__e,a=[],o=[],s=t.__P;s&&((e=te({constructor:_e},r)).__v=r.__v+1,C.vnode&&C.vnode(e),Ye(s,e,r,t.__n,s.namespaceURI,32&r.__u?[n]:null,a,n||X(r),32&r.__u,o),e.__v=r.__v,e.__.__k[e.__i]=e,Ot(a,e,o),r.__=r.__e=null,e.__e!=n&&kt(e))}function kt(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),kt(t)}function bt(t){(8&t.__g||(t.__g|=8,J.push(t),Oe++))&&We==C.debounceRendering||((We=C.debounceRendering)||queueMicrotask)(Mt)}function Mt(){try{for(var t,e=1;J.length;)J.length>e&&J.sort(wt),t=J.shift(),e=J.length,8&t.__g&&Ar(t)}finally{(Oe=J.length)&&(We||queueMicrotask)(Mt)}}function At(t,e,r,n,a,o,s,i,l,d,c){var h,f,p,u,_,m,x=n.__k||Te,g=e.length;for(l=Sr(r,e,x,l,g),h=0;h<g;h++)(p=r.__k[h])!=null&&(f=~p.__i&&x[p.__i]||ze,p.__i=h,m=Ye(t,p,f,a,o,s,i,l,d,c),u=p.__e,(f.ref!=p.ref||8&f.__u)&&(f.ref&&Ze(f.ref,null,p,f),p.ref&&c.push(p.ref,p.__c||u,p)),_=_||u,4&p.__u?(l=St(p,l,t,!f.__v),f.__e&&(f.__e=null)):typeof p.type=="function"&&m!==void 0?l=m:u&&(l=u.nextSibling),p.__u&=-21);return r.__e=_,l}function Sr(t,e,r,n,a){var o,s,i,l,d,c,h,f,p,u=r.length,_=u,m=0,x=0,g=t.__k=Array(a);for(o=0;o<a;o++)(s=e[o])!=null&&typeof s!="boolean"&&typeof s!="function"?(typeof s!="object"||s.constructor===String?s=g[o]=fe(null,s):Ke(s)?s=g[o]=fe(Ee,{children:s}):s.constructor===_e&&s.__b?s=g[o]=fe(s.type,s.props,s.key,s.ref,s.__v):g[o]=s,l=o+m,s.__=t,s.__b=t.__b+1,i=null,~(d=s.__i=Cr(s,r,l,_))&&(_--,(i=r[d])&&(i.__u|=2)),i&&i.__v?(s.__u|=16,d==l-1?m--:d==l+1?m++:d!=l&&(d>l?m--:m++,x=1)):(~d||(a>u?m--:a<u&&m++),typeof s.type!="function"&&(s.__u|=4))):g[o]=null;if(x){for(c=[],h=[],o=0;o<a;o++)if((s=g[o])&&16&s.__u){for(m=0,f=c.length;m<f;)c[p=m+f>>1]<s.__i?m=p+1:f=p;c[m]=s.__i,h[o]=m+1}for(m=c.length;o--;)h[o]&&(h[o]==m?m--:g[o].__u|=4)}if(_)for(o=0;o<u;o++)!(i=r[o])||2&i.__u||(i.__e==n&&(n=X(i)),Qe(i,i));return n}function St(t,e,r,n){var a,o,s,i;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(o=0;o<a.length;o++)a[o]&&(a[o].__=t,e=St(a[o],e,r,!1));return e}for(e&&!e.parentNode&&(e=X(t))&&!e.parentNode&&(e=null),s=t.__e,i=e;i&&i.nodeType==8;)i=i.nextSibling;for(s!=i&&(!n&&r.moveBefore&&s.parentNode?r.moveBefore(s,e):r.insertBefore(s,e||null)),e=s;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function Cr(t,e,r,n){var a,o=t.key,s=t.type,i=e[r],l=i&&!(2&i.__u);if(i===null&&o==null||l&&o==i.key&&s==i.type)return r;if(n>(l?1:0)){for(a=r-1;a>=0;a--)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a;for(a=r+1;a<e.length;a++)if((i=e[a])&&!(2&i.__u)&&o==i.key&&s==i.type)return a}return-1}function $t(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function Ae(t,e,r,n,a){var o,s;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof n=="string"&&(t.style.cssText=n=""),n)for(e in n)r&&e in r||$t(t.style,e);if(r)for(e in r)n&&r[e]==n[e]||$t(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof n!="function"&&(n=null),(t.__e||(t.__e={}))[e]=r,r&&n||(s=Ge[e]||(Ge[e]=Or(e)),(t.__a||(t.__a={}))[e]=Ve,o=e!=(e=e.replace(yt,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,s,o):t.removeEventListener(e,s,o));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function Or(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[Se]==null)e[Se]=Ve++;else if(e[Se]<this.__a[t])return;return r(C.event?C.event(e):e)}}}function Ye(t,e,r,n,a,o,s,i,l,d){var c,h,f,p,u,_,m,x,g,$,w,v,k,O,A,D,L,R,j=e.type;if(e.constructor!==_e)return null;128&r.__u&&(l=32&r.__u,c=r.__c.__z)&&(e.__u|=l,h=o=[],c.nodeType==8?i=Ce(c,o):o.push(c),i=o[0]||i),(c=C.__b)&&c(e);e:if(typeof j=="function"){f=s.length;try{if(x=e.props,g=(c=j.prototype)&&c.render,$=(c=j.contextType)&&n[c.__c],w=c?$?$.props.value:c.__:n,(p=r.__c)?(e.__c=p,2&p.__g&&(p.__g|=1)):(g?e.__c=p=new j(x,w):(e.__c=p=new me(x,w),p.constructor=j,p.render=Tr),$&&$.sub(p),p.state||(p.state={}),p.__n=n,p.__g|=8,p.__h=[],p.__k=[]),g&&(p.__s||(p.__s=p.state),j.getDerivedStateFromProps&&(p.__s==p.state&&(p.__s=te({},p.__s)),te(p.__s,j.getDerivedStateFromProps(x,p.__s)))),u=p.props,_=p.state,p.__v=e,r.__c){if(x!==u&&g&&!j.getDerivedStateFromProps&&p.componentWillReceiveProps&&p.componentWillReceiveProps(x,w),e.__v==r.__v&&!(8&p.__g)||!(4&p.__g)&&p.shouldComponentUpdate&&p.shouldComponentUpdate(x,p.__s,w)===!1){e.__v!=r.__v&&(p.props=x,p.state=p.__s,p.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(z){z&&(z.__=e)}),Te.push.apply(p.__h,p.__k),p.__k=[],p.__h.length&&s.push(p),i=X(r);break e}p.componentWillUpdate&&p.componentWillUpdate(x,p.__s,w),g&&p.componentDidUpdate&&p.__h.push(function(){p.componentDidUpdate(u,_,m)})}else g&&!j.getDerivedStateFromProps&&p.componentWillMount&&p.componentWillMount(),g&&p.componentDidMount&&p.__h.push(p.componentDidMount);p.context=w,p.props=x,p.__P=t,p.__g&=-5,v=C.__r,k=g?25:0;do p.__g&=-9,v&&v(e),c=p.render(p.props,p.state=p.__s,p.context);while(8&p.__g&&++k<25);g&&(Te.push.apply(p.__h,p.__k),p.__k=[]),p.state=p.__s,p.getChildContext&&(n=te({},n,p.getChildContext())),g&&r.__c&&p.getSnapshotBeforeUpdate&&(m=p.getSnapshotBeforeUpdate(u,_)),O=c&&c.type===Ee&&c.key==null?c.props.children:c,x.__P&&(c=i,a=(t=x.__P).namespaceURI,l=o=null,r.props&&r.props.__P!=t&&(r.__k.some(function(z){z&&Qe(z,z)}),r.__k=null),i=r.__k?X(r,0):null),i=At(t,Ke(O)?O:[O],e,r,n,a,o,s,i,l,d),x.__P&&(e.__e=null,i=c),e.__u&=-161,h&&h.some(ee),p.__h.length&&s.push(p),1&p.__g&&(p.__g&=-4)}catch(z){if(s.length=f,e.__v=null,l||o)if(z&&z.then){if(e.__u|=128|l,o){for(~(L=o.indexOf(i||void 0))||(L=o.length);(R=o[L-1])&&R.nodeType==8;)L--;for(;L<o.length;L++)if(R=o[L])if(o[L]=null,A){if(R==D)break}else{if(R.nodeType!=8)break;R.data.startsWith("$s")&&(D=Ce(A=R))}}if(!A){for(;i&&i.nodeType==8&&i.nextSibling;)i=i.nextSibling;A=i}(c=Ce(A=e.__c.__z||(e.__c.__z=A)))?(e.__e=A,i=c):e.__e=i,i=i&&i.nextSibling}else o&&o.some(ee);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),z&&z.then||Ct(e),C.__e(z,e,r)}}else i=e.__e=zr(r.__e,e,r,n,a,o,s,l,d,t);return(c=C.diffed)&&c(e),i}function Ce(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function Ct(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(Ct))}function Ot(t,e,r){for(var n=0;n<r.length;)Ze(r[n++],r[n++],r[n++]);C.__c&&C.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(o){o.call(a)})}catch(o){C.__e(o,a.__v)}})}function zr(t,e,r,n,a,o,s,i,l,d){var c,h,f,p,u,_,m,x,g=r.props||ze,$=e.props,w=e.type;if(w=="svg"?a="http://www.w3.org/2000/svg":w=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),o){for(c=0;c<o.length;c++)if((u=o[c])&&(w?u.localName==w:u.nodeType==3)){t=u,o[c]=null;break}}if(!t){if(x=d.ownerDocument||document,!w)return x.createTextNode($);t=x.createElementNS(a,w,$.is?$:d),i&&(C.__m&&C.__m(e,o),i=!1),o=null}if(w){if(d=w=="template"&&t.content||t,o=w=="textarea"&&$.defaultValue!=null?null:o&&Je.call(d.childNodes),!i&&o)for(g={},c=0;c<t.attributes.length;c++)g[(u=t.attributes[c]).name]=u.value;for(c in g)u=g[c],c=="dangerouslySetInnerHTML"?f=u:c=="children"||c in $||c=="value"&&"defaultValue"in $||c=="checked"&&"defaultChecked"in $||Ae(t,c,null,u,a);for(c in $)u=$[c],c=="children"?p=u:c=="dangerouslySetInnerHTML"?h=u:c=="value"?_=u:c=="checked"?m=u:i&&typeof u!="function"||g[c]===u||Ae(t,c,u,g[c],a);h?(i||f&&(h.__html==f.__html||h.__html==t.innerHTML)||(t.innerHTML=h.__html),e.__k=[]):(f&&(t.textContent=""),(w=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&Mr.test(w))&&(a="http://www.w3.org/1999/xhtml"),At(d,Ke(p)?p:[p],e,r,n,a,o,s,o?o[0]:r.__k&&X(r,0),i,l),o&&o.some(ee)),i&&w!="textarea"||(c="value",w=="progress"&&_==null?t.removeAttribute(c):_==null||_===t[c]&&(w!="progress"||_)||Ae(t,c,_,g[c],a),c="checked",m!=null&&m!=t[c]&&Ae(t,c,m,g[c],a))}else g===$||i&&t.data==$||(t.data=$);return t}function Ze(t,e,r,n){try{typeof t=="function"?e?e.__x=t(e)||1:n&&(n=n.__c||n.__e)&&(e=n.__x)&&(n.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){C.__e(a,r)}}function Qe(t,e,r){var n,a,o,s;if(C.unmount&&C.unmount(t),!(n=t.ref)||n.current&&n.current!=t.__e||Ze(n,null,e,t),n=t.__c){if(n.componentWillUnmount)try{n.componentWillUnmount()}catch(i){C.__e(i,e)}n.__P=n.__n=null}if(n=t.__k)for(s=0;s<n.length;s++)n[s]&&Qe(n[s],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(n=t.__c)&&(n=n.__z)&&(a=Ce(n,o=[]))&&(n==t.__e&&o.some(ee),ee(a),ee(n)),r||ee(t.__e),t.__e=t.__c=t.__=null}function Tr(t,e,r){return this.constructor(t,r)}function Pe(t,e){var r,n,a,o;C.__&&C.__(t,e),e.nodeType==9&&(e=e.documentElement),n=(r=t&&32&t.__u)?null:e.__k,e.__k=fe(Ee,{children:[t]}),a=[],o=[],Ye(e,e.__k,n||ze,ze,e.namespaceURI,n?null:e.firstChild?Je.call(e.childNodes):null,a,n?n.__e:e.firstChild,r,o),Ot(a,e.__k,o),e.__k.props.children=null}C={__e:function(t,e,r,n){for(var a,o,s;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((s=(o=a.constructor)&&o.getDerivedStateFromError)&&a.setState(o.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,n||{}),s=1),s&&8&a.__g)return void(a.__g|=2)}catch(i){t=i}}throw Oe=0,t}},vt=0,yr=function(t){return t!=null&&t.constructor===_e},me.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=te({},this.state)),typeof t=="function"&&(t=t(te({},r),this.props)),t&&(te(r,t),this.__v&&(e&&this.__k.push(e),bt(this)))},me.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),bt(this))},me.prototype.render=Ee,J=[],Oe=0,wt=function(t,e){return t.__v.__b-e.__v.__b},Se=Symbol(),yt=/(PointerCapture)$|Capture$/i,Ve=0,Ge={},kr=0;var Tt=function(t,e,r,n){var a;e[0]=0;for(var o=1;o<e.length;o++){var s=e[o++],i=e[o]?(e[0]|=s?1:2,r[e[o++]]):e[++o];s===3?n[0]=i:s===4?n[1]=Object.assign(n[1]||{},i):s===5?(n[1]=n[1]||{})[e[++o]]=i:s===6?n[1][e[++o]]+=i+"":s?(a=t.apply(i,Tt(t,i,r,["",null])),n.push(a),i[0]?e[0]|=2:(e[o-2]=0,e[o]=a)):n.push(i)}return n},zt=new Map;function Et(t){var e=zt.get(this);return e||(e=new Map,zt.set(this,e)),(e=Tt(this,e.get(t)||(e.set(t,e=(function(r){for(var n,a,o=1,s="",i="",l=[0],d=function(f){o===1&&(f||(s=s.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?l.push(0,f,s):o===3&&(f||s)?(l.push(3,f,s),o=2):o===2&&s==="..."&&f?l.push(4,f,0):o===2&&s&&!f?l.push(5,0,!0,s):o>=5&&((s||!f&&o===5)&&(l.push(o,0,s,a),o=6),f&&(l.push(o,f,0,a),o=6)),s=""},c=0;c<r.length;c++){c&&(o===1&&d(),d(c));for(var h=0;h<r[c].length;h++)n=r[c][h],o===1?n==="<"?(d(),l=[l],o=3):s+=n:o===4?s==="--"&&n===">"?(o=1,s=""):s=n+s[0]:i?n===i?i="":s+=n:n==='"'||n==="'"?i=n:n===">"?(d(),o=1):o&&(n==="="?(o=5,a=s,s=""):n==="/"&&(o<5||r[c][h+1]===">")?(d(),o===3&&(l=l[0]),o=l,(l=l[0]).push(2,0,o),o=0):n===" "||n==="	"||n===`
`||n==="\r"?(d(),o=2):s+=n),o===3&&s==="!--"&&(o=4,l=l[0])}return d(),l})(t)),e),arguments,[])).length>1?e:e[0]}var b=Et.bind(Xe);var ge,E,et,Pt,tt=Object.is,be=0,Ut=[],rt=[],T=C,Nt=T.__b,qt=T.__r,Lt=T.diffed,Rt=T.__c,jt=T.unmount,Ht=T.__;function ot(t,e){T.__h&&T.__h(E,t,be||e),be=0;var r=E.__H||(E.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function U(t){return be=1,Er(Wt,t)}function Er(t,e,r){var n=ot(ge++,2);if(n.t=t,!n.__c&&(n.__=[r?r(e):Wt(void 0,e),function(o){var s=(n.__N||n.__)[0],i=n.t(s,o);tt(s,i)||(n.__N=[i,n.__[1]],n.__c.setState({}))}],n.__c=E,!E.__f)){E.__f=!0;var a=E.shouldComponentUpdate;E.shouldComponentUpdate=function(o,s,i){var l=this.__H;if(!l)return!0;var d=!1,c=this.props!=o;if(l.__.some(function(f){f.__N&&(d=!0,tt(f.__[0],f.__N[0])||(c=!0))}),a){var h=a.call(this,o,s,i);return d?h||c:h}return!d||c}}return n.__}function P(t,e){var r=ot(ge++,3);!T.__s&&Ft(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,E.__H.__h.push(r))}function N(t){return be=5,V(function(){return{current:t}},[])}function V(t,e){var r=ot(ge++,7);return Ft(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function Bt(t,e){return be=8,V(function(){return t},e)}function Pr(){var t;do{for(;t=rt.shift();)try{xe(t)}catch(r){T.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=Ut.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(xe),e.__h.some(nt),e.__h=[]}catch(r){e.__h=[],T.__e(r,t.__v)}}}while(rt.length)}T.__b=function(t){E=null,Nt&&Nt(t)},T.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),Ht&&Ht(t,e)},T.__r=function(t){qt&&qt(t),ge=0;var e=(E=t.__c).__H;e&&(et==E?E.__h=[]:(e.__h.some(xe),e.__h.some(nt),ge=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),et=E},T.diffed=function(t){Lt&&Lt(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&Dt(Ut.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),et=E=null},T.__c=function(t,e){e.some(function(r){try{r.__h.some(xe),r.__h=r.__h.filter(function(n){return!n.__||nt(n)})}catch(n){r.__h=[function(){throw n}]}}),Rt&&Rt(t,e)},T.unmount=function(t){jt&&jt(t);var e,r,n=t.__c;n&&n.__H&&(n.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,Dt(rt.push(a))}else xe(a)}catch(o){e=o}}),n.__H=void 0,e&&T.__e(e,n.__v))};var It=typeof requestAnimationFrame=="function";function Nr(t){var e,r=function(){clearTimeout(n),It&&cancelAnimationFrame(e),setTimeout(t)},n=setTimeout(r,35);It&&(e=requestAnimationFrame(r))}function Dt(t){t!=1&&Pt==T.requestAnimationFrame||((Pt=T.requestAnimationFrame)||Nr)(Pr)}function xe(t){var e=E,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),E=e}function nt(t){var e=E;t.__c=t.__(),E=e}function Ft(t,e){return!t||t.length!=e.length||e.some(function(r,n){return!tt(r,t[n])})}function Wt(t,e){return typeof e=="function"?e(t):e}var qr={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function Gt(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let n=qr[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(n.length-1),o=Math.min(Math.floor(a),n.length-2);for(let s=0;s<3;s++){let[i,l]=[n[o][s],n[o+1][s]];e[3*r+s]=i+(l-i)*(a-o)}}return e}var at={light:Gt("light"),dark:Gt("dark")};function st(){let{jpThemeLight:t}=document.body.dataset;if(t!==void 0)return t==="true"?"light":"dark";for(let e of["light","dark"])if(document.body.classList.contains(`${e}-theme`))return e;return matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"}var Ne=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),ae=t=>at[t];function Vt(t,e,r){let n=3*Ne(t,e),[a,o,s]=at[r].subarray(n,n+3);return`rgb(${a} ${o} ${s})`}function Kt(t,e,r){let n=3*Ne(t,e),[a,o,s]=at[r].subarray(n,n+3);return .299*a+.587*o+.114*s>140?"#14161a":"#ffffff"}var K={left:[],right:[]},Xt={text:"",added:K,answer:null,lambdas:{all:null,layers:{},heads:{}},left:{layer:1,head:1},right:{layer:1,head:1},row:null},Lr=({layer:t,head:e})=>`${t}.${e}`,Jt=t=>t.split(",").filter(Boolean).map(Number);function $e(t){let e=new URLSearchParams;e.set("text",t.text);for(let s of["left","right"])e.set(s,Lr(t[s])),t.added[s].length&&e.set(`${s}-added`,t.added[s].join(","));let{all:r,layers:n,heads:a}=t.lambdas,o=[...r===null?[]:[["all",r]],...Object.entries(n),...Object.entries(a)];return o.length&&e.set("lambda",o.map(([s,i])=>`${s}:${i}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function it(t,e,r){let n=new URLSearchParams(t.slice(1));if(!n.has("text"))return e;let a={...e,text:n.get("text"),answer:null,added:{...K}};for(let i of["left","right"]){let[l,d]=(n.get(i)??"").split(".").map(Number),c=r[i];c&&l>=1&&l<=c.layers&&d>=1&&d<=c.heads&&(a[i]={layer:Math.floor(l),head:Math.floor(d)});let h=Jt(n.get(`${i}-added`)??"");h.every(Number.isInteger)&&(a.added[i]=h)}a.lambdas={all:null,layers:{},heads:{}};for(let i of(n.get("lambda")??"").split(",")){let[l,d]=i.split(":"),c=Number(d);d===void 0||!Number.isFinite(c)||(l==="all"?a.lambdas.all=c:/^\d+$/.test(l)?a.lambdas.layers[l]=c:/^\d+\.\d+$/.test(l)&&(a.lambdas.heads[l]=c))}let o=Jt(n.get("answer")??"");o.length===3&&o.every(Number.isInteger)&&(a.answer={query:o[0],begin:o[1],end:o[2]});let s=Number(n.get("row")??NaN);return Number.isInteger(s)&&s>=0&&(a.row=s),a}var se=({all:t,layers:e,heads:r},{layer:n,head:a})=>r[`${n}.${a}`]??e[n]??t,Y=({all:t,layers:e,heads:r})=>t!==null||Object.keys(e).length>0||Object.keys(r).length>0;var lt=new Float32Array(65536);for(let t=0;t<lt.length;t++){let e=t>>10&31,r=t&1023,n=e===0?r*2**-24:(1+r/1024)*2**(e-15);lt[t]=t>>15?-n:n}var ie=t=>t*(t+1)/2;function le(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375473)throw new Error("These are no attention maps.");let n=r.getUint32(4,!0),a=r.getUint32(8,!0),o=r.getUint32(12,!0),s=ie(a),i=16,l=null;if(o===2){l=new Float32Array(n),a&&l.set(e.lam.subarray(0,a));for(let c=a;c<n;c++,i+=4)l[c]=r.getFloat32(i,!0)}let d=["first","second"].slice(0,o).map(c=>{let h=new Float32Array(ie(n));a&&h.set(e[c].subarray(0,s));for(let f=s;f<h.length;f++,i+=2)h[f]=lt[r.getUint16(i,!0)];return h});return{length:n,lam:l,first:d[0],second:d[1]??null}}function ct({lam:t,first:e,second:r},n){let a=ie(n);return{length:n,lam:t?.subarray(0,n)??null,first:e.subarray(0,a),second:r?.subarray(0,a)??null}}function qe(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let n=0,a=0;n<t.length;n++){let o=e??t.lam[n];for(let s=0;s<=n;s++,a++)r[a]=t.first[a]-o*t.second[a]}return r}var G=(t,e)=>t.subarray(ie(e),ie(e+1));function ve(t,...e){let r=ie(Math.floor(t/4)),n=0;for(let a of e)for(let o=r;o<a.length;o++){let s=Math.abs(a[o]);s>n&&(n=s)}return n||1}function Le(t){let e=atob(t),r=new Uint8Array(e.length);for(let n=0;n<e.length;n++)r[n]=e.charCodeAt(n);return r.buffer}var Yt={"\n":"⏎","	":"⇥","\r":"␍"},we=t=>[...t].map(e=>{if(e in Yt)return Yt[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function H(t,e=14){let r=we(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),n=[...r];return n.length>e?`${n.slice(0,e-1).join("")}…`:r||"∅"}var q=(t,e=0)=>`${(100*t).toFixed(e)} %`;function S(t,e=3){return t==null||Number.isNaN(t)?"–":(Math.abs(t)>=.001||t===0?t.toFixed(e):t.toExponential(1)).replace("-","−")}var F=(t,e)=>`${t}.${e}`,pt=({heads:t,noise_heads:e},r)=>e?Math.ceil(r*e/t):null;function ce(t,e){let r=pt(t,e);if(r===null)return"";let n=t.heads/t.noise_heads;return`signal head ${e-(r-1)*n} of noise head ${r}`}function Zt(t,e,r,n){let a=[];for(let s=1;s<r.length;s++){let i=G(e,s),l=0;for(let d=1;d<i.length;d++)Math.abs(i[d])>Math.abs(i[l])&&(l=d);a.push([Math.abs(i[l]),s,l,i[l]])}a.sort((s,i)=>i[0]-s[0]);let o=a.slice(0,3).map(([,s,i,l])=>{let[d,c]=[s,i].map(h=>`token ${h+1} “${H(n[h]??"")}”`);return`${d} gives ${S(l,2)} to ${c}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${o.join("; ")}.`}var Rr=450;function Qt({models:t,runs:e,view:r,source:n,question:a,onChange:o,onRefusal:s}){let[i,l]=U(!1),[d,c]=U(0),h=N(!1),f=Object.keys(t),p=(n.live||!Y(r.lambdas))&&f.every(x=>e[x]&&e[x].tokens.length<t[x].most_tokens),u=async()=>{if(!h.current){h.current=!0;try{let x=await Promise.all(f.map(g=>n.next({...a(g),temperature:d,seed:0})));o(g=>{let $={...g.added};return f.forEach((w,v)=>$[w]=[...$[w],x[v].token]),{added:$,row:null}})}catch(x){l(!1),s({side:"left",message:x.message})}finally{h.current=!1}}};P(()=>{if(!i)return;if(!p){f.every(g=>e[g])&&l(!1);return}let x=setTimeout(u,Rr);return()=>clearTimeout(x)});let _=()=>{l(!1),o({added:K,row:null})},m=x=>e[x]?.pieces.slice(e[x].pieces.length-r.added[x].length)??[];return b`
    <section class="card generation" aria-labelledby="generation-title">
      <h2 id="generation-title">Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!p} onClick=${u}>Step</button>
        <button type="button" disabled=${!p&&!i} aria-pressed=${i}
          onClick=${()=>l(!i)}>${i?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${_}>Begin again</button>
        ${n.live&&b`<label class="temperature">Temperature
          <select value=${d} onChange=${x=>c(Number(x.target.value))}>
            ${[0,.5,.8,1,1.5].map(x=>b`<option key=${x} value=${x}>${x||"0, most likely"}</option>`)}
          </select>
        </label>`}
      </div>
      ${f.map(x=>r.added[x].length>0&&b`
        <p class="written" key=${x}><span class="quiet">${t[x].label} </span>
          ${m(x).map((g,$,w)=>b`<span class=${$===w.length-1?"last":""}>${we(g)}</span>${t[x].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom${f.length>1?"; both models write one at a time":""}.
        ${!n.live&&` This saved page holds what the ${f.length>1?"models write":"model writes"} with the learned λ.`}</p>
    </section>`}function dt(t,e,r){let n=new Float32Array(r*r);for(let a=0,o=0;a<e;a++){let s=r*Math.floor(a*r/e);for(let i=0;i<=a;i++,o++){let l=s+Math.floor(i*r/e);Math.abs(t[o])>Math.abs(n[l])&&(n[l]=t[o])}}return n}function er(t,e,r,n){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),o=a.createImageData(r,r),s=ae(n);for(let i=0;i<e.length;i++){let l=3*e[i];o.data[4*i]=s[l],o.data[4*i+1]=s[l+1],o.data[4*i+2]=s[l+2],o.data[4*i+3]=255}a.putImageData(o,0,0)}function Re(t,e,r,n,a,o=640){let s=Math.min(r,o),i=dt(e,r,s);er(t,Uint16Array.from(i,l=>Ne(l,n)),s,a)}function je(t,e,r,n){er(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,n)}function He(){let t=N(null),[e,r]=U(0);return P(()=>{let n=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return n.observe(t.current),()=>n.disconnect()},[]),[t,e]}var tr=168,re={left:44,right:10,top:26,bottom:18};function ut(t,e,r,n,a,o=tr){let s=G(t.first,n),i=G(e,n),l=t.second?r??t.lam[n]:0,d=t.second?G(t.second,n).map(v=>l*v):null,[c,h]=[0,1e-9];for(let v of[s,i,d??s])for(let k of v)k<c&&(c=k),k>h&&(h=k);let f={width:a-re.left-re.right,height:o-re.top-re.bottom},p=f.width/t.length,u=v=>re.left+(v+.5)*p,_=v=>re.top+(h-v)/(h-c)*f.height,m=v=>`M${Array.from(v,(k,O)=>`${u(O).toFixed(1)},${_(k).toFixed(1)}`).join("L")}`,x=Math.max(1,Math.min(14,p*.62)),g=Array.from(i,(v,k)=>[u(k)-x/2,_(Math.max(0,v)),x,Math.abs(_(v)-_(0)),v]),$=Array.from(i,(v,k)=>[Math.abs(v),k]).sort((v,k)=>k[0]-v[0]).slice(0,4).filter(([v])=>v>.08*h).map(([,v])=>v),w=$.filter((v,k)=>$.slice(0,k).every(O=>Math.abs(u(v)-u(O))>56));return{first:m(s),taken:d&&m(d),bars:g,zero:_(0),x:u,y:_,low:c,high:h,labelled:w,left:i,end:a-re.right}}function rr({maps:t,net:e,lam:r,pieces:n,row:a,isPinned:o}){let[s,i]=He(),l=i>120?ut(t,e,r,a,i):null;return b`
    <figure class="curve" ref=${s}>
      <figcaption>
        <span>Row of token ${a+1} <b>${H(n[a]??"",24)}</b>${o?b` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&b`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${l&&b`
        <svg width=${i} height=${tr} role="img" aria-label=${jr(l,n,a)}>
          <line class="axis" x1="44" x2=${l.end} y1=${l.zero} y2=${l.zero} />
          <text class="tick" x="38" y=${l.y(l.high)} dy="0.32em" text-anchor="end">${S(l.high,2)}</text>
          <text class="tick" x="38" y=${l.zero} dy="0.32em" text-anchor="end">0</text>
          ${l.low<-.12*l.high&&b`<text class="tick" x="38" y=${l.y(l.low)} dy="0.32em" text-anchor="end">${S(l.low,2)}</text>`}
          ${l.bars.map(([d,c,h,f,p],u)=>b`<rect key=${u} class=${p<0?"net negative":"net"} x=${d} y=${p<0?l.zero:c} width=${h} height=${f} />`)}
          <path class="first" d=${l.first} />
          ${l.taken&&b`<path class="taken" d=${l.taken} />`}
          ${l.labelled.map(d=>b`<text key=${`l${d}`} class="peak" x=${Math.max(60,Math.min(l.end-20,l.x(d)))}
            y=${l.y(Math.max(l.left[d],0))-7} text-anchor="middle">${H(n[d]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var jr=(t,e,r)=>`What token ${r+1} “${H(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(n=>`token ${n+1} “${H(e[n]??"")}” with ${S(t.left[n],2)}`).join(", ")}.`;var ye={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Ie={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},Hr="system-ui, -apple-system, 'Segoe UI', sans-serif",Ir=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function I(t,e,r,{size:n=12,colour:a,anchor:o="start",weight:s=400,turn:i=0}){let l=i?` transform="rotate(${i} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${n}" fill="${a}" text-anchor="${o}" font-weight="${s}"${l}>${Ir(r)}</text>`}function ht(t,e,r,n){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${Hr}">`,`<rect width="${t}" height="${e}" fill="${ye[r][2]}"/>`,...n,"</svg>"].join(`
`)}var or=(t,e,r,n)=>`<image x="${e}" y="${r}" width="${n}" height="${n}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function Dr({models:t,view:e,panels:r,pieces:n,row:a,scale:o,lam:s,theme:i,left:l,net:d}){let[c,h]=ye[i],f=300,p=52,u=28,_=40+r.length*(f+p)+(r.length-1)*u,m=[I(20,34,`${t.left.name}: layer ${e.left.layer}, head ${[e.left.head,ce(t.left,e.left.head)].filter(Boolean).join(", ")}${s==null?"":`, λ = ${S(s,2)}`}`,{size:17,colour:c,weight:600})];r.forEach((v,k)=>{let O=20+p+k*(f+p+u),A=66+p,D=document.createElement("canvas");Re(D,v.weights,v.maps.length,o,i),m.push(I(O,A-p-8,v.name,{size:14,colour:c,weight:600}),or(D,O,A,f));let L=f/v.maps.length;for(let R=0;R<v.maps.length;R+=Math.max(1,Math.ceil(11/L))){let j=H(n[v.side][R]??"",8),z=(R+.5)*L+3.5;m.push(I(O-4,A+z,j,{size:9.5,colour:h,anchor:"end"})),m.push(I(O+z,A-4,j,{size:9.5,colour:h,turn:-90}))}m.push(`<rect x="${O}" y="${A+Math.min(a,v.maps.length-1)*L}" width="${f}" height="${Math.max(1.5,L)}" fill="none" stroke="${c}"/>`)});let x=66+p+f+40,g=Math.min(a,l.length-1),$=ut(l,d,l.second?s:null,g,_-40);m.push(I(20,x,`Row of token ${g+1} “${H(n.left[g]??"",24)}”`,{size:13,colour:c,weight:600})),m.push(`<g transform="translate(20 ${x+6})">`),m.push(...$.bars.map(([v,k,O,A,D])=>`<rect x="${v}" y="${D<0?$.zero:k}" width="${O}" height="${A}" fill="${c}" opacity="0.32"/>`)),m.push(`<path d="${$.first}" fill="none" stroke="${Ie[i][0]}" stroke-width="1.6"/>`),$.taken&&m.push(`<path d="${$.taken}" fill="none" stroke="${Ie[i][1]}" stroke-width="1.6"/>`),m.push(`<line x1="44" x2="${$.end}" y1="${$.zero}" y2="${$.zero}" stroke="${h}"/>`),m.push(...$.labelled.map(v=>I($.x(v),$.y(Math.max(0,$.left[v]))-7,H(n.left[v]??"",12),{size:11,colour:c,anchor:"middle"}))),m.push(I(38,$.y($.high)+4,S($.high,2),{size:10,colour:h,anchor:"end"}),"</g>");let w=x+200;return m.push(...Ur(36,w,o,i)),l.second&&m.push(I(_-20,w+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:h,anchor:"end"})),ht(_,w+44,i,m)}function Ur(t,e,r,n){let a=ae(n),o=[];for(let s=0;s<64;s++){let i=3*Math.round(510*s/63);o.push(`<rect x="${t+4*s}" y="${e}" width="4.2" height="10" fill="rgb(${a[i]},${a[i+1]},${a[i+2]})"/>`)}return[-1,0,1].forEach(s=>o.push(I(t+128*(1+s),e+24,S(s*r,2),{size:10,colour:ye[n][1],anchor:"middle"}))),o}function Br(t,e,r,n){let[a,o]=ye[n],s=t.heads>8?48:96,i=s+(t.heads>8?8:24),l=[I(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let d=1;d<=t.layers;d++){let c=56+(d-1)*i;l.push(I(34,c+s/2+4,String(d),{size:11,colour:o,anchor:"end"}));for(let h=1;h<=t.heads;h++){let f=44+(h-1)*(s+8),p=document.createElement("canvas");if(je(p,r(d,h),e.picture_size,n),l.push(or(p,f,c,s)),s>60){let u=e.removed?.[d-1][h-1],_=u===void 0?F(d,h):`${F(d,h)}  −${q(u)}`;l.push(I(f,c+s+14,_,{size:10.5,colour:o}))}}}return ht(64+t.heads*(s+8),64+t.layers*i+8,n,l)}function nr(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function ft(t,e,r){let n=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){nr(n,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(n),await a.decode();let o=document.createElement("canvas");[o.width,o.height]=[2*a.width,2*a.height],o.getContext("2d").drawImage(a,0,0,o.width,o.height),URL.revokeObjectURL(a.src),o.toBlob(s=>nr(s,`${e}.png`),"image/png")}function Fr(t,{next:e,divergence:r,loss:n,learned_loss:a},o){let[s,i]=ye[o],l=e.slice(0,10),d=Math.max(...l.flatMap($=>[$.probability,$.learned_probability]),1e-9),c=r>0,[h,f,p]=[140,260,24],u=h+f+(c?140:80),_=[I(20,34,`${t.name}: next token`,{size:17,colour:s,weight:600})];l.forEach(($,w)=>{let v=56+w*p,[k,O]=[$.probability,$.learned_probability].map(A=>f*A/d);_.push(I(h-8,v+14,H($.piece),{colour:s,anchor:"end"}),`<rect x="${h}" y="${v+3}" width="${Math.max(1,k)}" height="${p-8}" fill="${Ie[o][0]}"/>`,I(h+f+58,v+14,q($.probability,1),{colour:s,anchor:"end"})),c&&_.push(`<rect x="${h+O-1}" y="${v}" width="2" height="${p-2}" fill="${Ie[o][1]}"/>`,I(h+f+120,v+14,q($.learned_probability,1),{colour:i,anchor:"end"}))});let m=56+l.length*p+22,x=c?`${S(n)} (${S(a)})`:S(n),g=c?`KL ${S(r)} nats, loss on the text ${x}; orange, grey: learned λ`:`loss on the text ${x}`;return _.push(I(20,m,g,{size:11,colour:i})),ht(u,m+18,o,_)}var ar=(t,e)=>ft(Dr(t),`head-${F(t.view.left.layer,t.view.left.head)}`,e),sr=(t,e,r,n)=>ft(Fr(t,e,r),`next-${t.name}`,n),ir=(t,e,r,n,a)=>ft(Br(t,e,r,n),`heads-${t.name}`,a);var pe=({disabled:t,onSave:e})=>["PNG","SVG"].map(r=>b`<button type="button" key=${r} class="link" disabled=${t} onClick=${()=>e(r.toLowerCase())}>${r}</button>`);function Wr({picture:t,side:e,theme:r}){let n=N(null);return P(()=>{t&&je(n.current,t,e,r)},[t,e,r]),b`<canvas ref=${n} width="8" height="8" aria-hidden="true"></canvas>`}var Gr={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function lr({side:t,model:e,run:r,chosen:n,theme:a,onChoose:o}){let s=N(null),i=r?.heads,l=V(()=>{if(!i)return null;let _=typeof i.pictures=="string"?new Int8Array(Le(i.pictures)):i.pictures,m=i.picture_size**2;return(x,g)=>_.subarray(((x-1)*e.heads+g-1)*m,((x-1)*e.heads+g)*m)},[i?.pictures]),d=_=>{let m=Gr[_.key];if(!m)return;_.preventDefault();let x=Math.min(e.layers,Math.max(1,n.layer+m[0])),g=Math.min(e.heads,Math.max(1,n.head+m[1]));o({layer:x,head:g}),s.current.querySelector(`[data-head="${F(x,g)}"]`)?.focus()},c=_=>Array.from({length:_},(m,x)=>x+1),h=(_,m)=>i?.removed?.[_-1][m-1],f=(_,m)=>i?.on_answer?.[_-1][m-1],p=(_,m)=>[`Head ${F(_,m)}`,ce(e,m),h(_,m)!==void 0&&`the subtraction removes ${q(h(_,m))} of A1`,f(_,m)!==void 0&&`${q(f(_,m))} on the answer`].filter(Boolean).join(", "),u=e.heads>8;return b`
    <section class=${`card grid-card ${u?"dense":""}`} aria-labelledby=${`grid-${t}`}>
      <div class="card-head">
        <h2 id=${`grid-${t}`}>${e.label}, all heads</h2>
        <span class="buttons">
          <${pe} disabled=${!i} onSave=${_=>ir(e,i,l,a,_)} />
        </span>
      </div>
      <div class="scroll">
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} ref=${s} onKeyDown=${d}
          style=${`--heads:${e.heads};--thumb:${u?44:e.heads>4?92:124}px`}>
          ${c(e.layers).map(_=>b`
            <div class="grid-row" role="row" key=${_}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${_}</span>
              ${c(e.heads).map(m=>{let x=n.layer===_&&n.head===m;return b`
                  <button type="button" role="gridcell" key=${m} class=${`head ${x?"chosen":""}`}
                    aria-selected=${x} tabindex=${x?0:-1} data-head=${F(_,m)}
                    aria-label=${p(_,m)} title=${p(_,m)} onClick=${()=>o({layer:_,head:m})}>
                    <${Wr} picture=${l?.(_,m)} side=${i?.picture_size} theme=${a} />
                    ${!u&&b`<span class="numbers" aria-hidden="true">
                      ${h(_,m)!==void 0&&b`<span>${h(_,m)>.005?"−":""}${q(h(_,m))}</span>`}
                      ${f(_,m)!==void 0&&b`<span class="on-answer">◎ ${q(f(_,m))}</span>`}
                    </span>`}
                    ${u&&h(_,m)!==void 0&&b`<span class="gauge" aria-hidden="true" style=${{width:`${100*h(_,m)}%`}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(u?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${i?.on_answer&&!u?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var Vr=46,Kr=11;function cr({panel:t,pieces:e,size:r,scale:n,theme:a,row:o,answer:s,added:i,onHover:l,onPin:d}){let c=N(null),{maps:h,weights:f,name:p}=t;P(()=>{Re(c.current,f,h.length,n,a)},[f,h.length,n,a]);let u=r>=200?Vr:0,_=r-u,m=_/h.length,x=Math.max(1,Math.ceil(Kr/m)),g=[];if(u)for(let k=0;k<h.length;k+=x)g.push(k);let $=k=>{let O=c.current.getBoundingClientRect(),A=Math.floor((k.clientY-O.top)/O.height*h.length);return Math.max(0,Math.min(h.length-1,A))},w=k=>u+(k+.5)*m,v=s&&s.end<=h.length;return b`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${p}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${c} width="8" height="8" role="img" aria-label=${Zt(p,f,h,e)}
          data-map=${t.key} style=${{left:`${u}px`,top:`${u}px`,width:`${_}px`,height:`${_}px`}}
          onPointerMove=${k=>l($(k))} onPointerLeave=${()=>l(null)}
          onClick=${k=>d($(k))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${g.map(k=>b`
            <text key=${`r${k}`} x=${u-4} y=${w(k)} class=${k===o?"on":""} dy="0.32em"
              text-anchor="end">${H(e[k]??"",7)}</text>
            <text key=${`c${k}`} transform=${`translate(${w(k)} ${u-4}) rotate(-90)`} dy="0.32em">${H(e[k]??"",7)}</text>`)}
          ${v&&b`<rect class="answer" x=${u+s.begin*m} y=${u}
            width=${Math.max(1.5,(s.end-s.begin)*m)} height=${_} />`}
          ${i>0&&b`<line class="added" x1=${u} x2=${r} y1=${u+(h.length-i)*m}
            y2=${u+(h.length-i)*m} />`}
          <rect class="row" x=${u} y=${u+o*m} width=${_} height=${Math.max(2,m)} />
        </svg>
      </div>
    </figure>`}function pr({scale:t,theme:e}){let r=N(null);P(()=>{let a=r.current.getContext("2d"),o=a.createImageData(511,1),s=ae(e);for(let i=0;i<511;i++){for(let l=0;l<3;l++)o.data[4*i+l]=s[3*i+l];o.data[4*i+3]=255}a.putImageData(o,0,0)},[e]);let n=[-1,-.25,0,.25,1];return b`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${S(t,2)} over the background at 0 to blue at ${S(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${n.map(a=>b`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${Math.abs(a)===1?`${a<0?"≤ ":"≥ "}${S(a*t,2)}`:S(a*t,2)}</span>`)}
      </div>
    </div>`}function dr({pieces:t,values:e,scale:r,theme:n,row:a,pinned:o,answer:s,added:i,between:l,onHover:d,onPin:c,onAnswer:h}){let f=N(null),p=s!==null&&o>=s.begin&&o<s.end,u=x=>{let $={ArrowLeft:-1,ArrowRight:1,ArrowUp:-10,ArrowDown:10,Home:-t.length,End:t.length}[x.key];if(x.key==="Escape"&&o!==null)c(o);else if($!==void 0){x.preventDefault();let w=Math.max(0,Math.min(t.length-1,a+$));d(null),w!==o&&c(w)}},_=x=>{let g=x.target.closest("[data-token]");return g?Number(g.dataset.token):null},m=x=>["token",x===a&&"on",x===o&&"pinned",s&&x>=s.begin&&x<s.end&&"answer",x>=t.length-i&&"new"].filter(Boolean).join(" ");return b`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${o!==null?", Esc lets go":""}.</span>
      ${h&&o!==null&&o<t.length-1&&b`<button type="button" class="link"
          onClick=${()=>h(p?null:{query:t.length-1,begin:o,end:o+1})}>${p?"No longer the answer":"Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${l?"spaced":""}`} role="listbox" tabindex="0" aria-label="Tokens of the text" ref=${f}
      aria-activedescendant=${`token-${a}`} onKeyDown=${u} onPointerOver=${x=>d(_(x))}
      onPointerLeave=${()=>d(null)} onClick=${x=>_(x)!==null&&c(_(x))}>
      ${t.map((x,g)=>{let $=g<e.length?e[g]:0,w=g<e.length?{background:Vt($,r,n),color:Kt($,r,n)}:{};return b`<span key=${g} id=${`token-${g}`} class=${m(g)} style=${w} role="option"
          data-token=${g} aria-selected=${g===a} title=${`token ${g+1}: ${S($)}`}>${we(x)}</span>${x.includes(`
`)?b`<br />`:""}`})}
    </div>`}function Jr({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let n=t/e,a=Math.ceil(r/n);return`shares key/value head ${a} with heads ${(a-1)*n+1}–${a*n}`.replace(/heads (\d+)–\1$/,"head $1")}function ur({models:t,runs:e,maps:r,view:n,theme:a,row:o,hovered:s,shared:i,onHover:l,onChange:d,live:c,hasAddress:h}){let[f,p]=He(),[u,_]=[r.left,r.right],m=u&&u.head.layer===n.left.layer&&u.head.head===n.left.head,x=t.left.subtracts?se(n.lambdas,n.left):null,g=m?x:null,$=V(()=>u?qe(u,g):null,[u,g]),w=V(()=>u?Math.max(ve(u.length,u.first,u.second??[],$),_?ve(_.length,_.first):0):1,[u,_,$]),v={left:e.left?.pieces??[],right:e.right?.pieces??[]},k=u?g??u.lam?.[Math.min(o,u.length-1)]:null,O=F(n.left.layer,n.left.head),A=[];if(u?.second){let M=pt(t.left,u.head.head),Z=M===null?"A₂":`A₂ of noise head ${M}`;A.push({key:"first",name:"A₁",side:"left",maps:u,weights:u.first}),A.push({key:"second",name:Z,side:"left",maps:u,weights:u.second}),A.push({key:"net",name:"A₁ − λA₂",side:"left",maps:u,weights:$,strong:!0})}if(_){let M=`${t.right.label} ${F(_.head.layer,_.head.head)}`;A.push({key:"right",name:M,side:"right",maps:_,weights:_.first})}let D=p>=(A.length===3?540:860)?A.length:Math.min(2,A.length),L=p>=860?20:12,R=Math.max(0,Math.floor((p-L*(D-1))/Math.max(1,D))),j=M=>d(Z=>({row:Z.row===M?null:M})),z=[ce(t.left,n.left.head),Jr(t.left,n.left)];t.left.lambda_per_token&&z.push("a λ for every token");let y={models:t,view:n,panels:A,pieces:v,row:o,scale:w,lam:k,theme:a,left:u,net:$,right:_};return b`
    <section class="card head-view" aria-labelledby="head-title">
      <div class="card-head">
        <h2 id="head-title">
          Layer ${n.left.layer}, head ${n.left.head}
          ${k!=null&&b` <span class="quiet">λ = ${S(k,2)}</span>`}
          ${z.filter(Boolean).map(M=>b` <span class="quiet note">${M}</span>`)}
        </h2>
        <span class="buttons">
          ${h&&b`<button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href.split("#")[0]+$e(n))}>Copy link</button>`}
          <${pe} disabled=${!u} onSave=${M=>ar(y,M)} />
        </span>
      </div>
      <div ref=${f} class="panels" style=${{gridTemplateColumns:`repeat(${D||1}, 1fr)`,gap:`${L}px`}}>
        ${R>0&&A.map(M=>b`
          <${cr} key=${M.key} panel=${M} pieces=${v[M.side]} size=${R} scale=${w} theme=${a}
            row=${Math.min(o,M.maps.length-1)} answer=${M.side==="left"||i?n.answer:null}
            added=${n.added[M.side].length} head=${M.side==="left"?O:null}
            onHover=${l} onPin=${j} />`)}
      </div>
      <${pr} scale=${w} theme=${a} />
      ${u&&b`
        <${dr} pieces=${v.left.slice(0,u.length)} values=${G($,Math.min(o,u.length-1))} scale=${w} theme=${a}
          between=${t.left.between} row=${Math.min(o,u.length-1)} pinned=${n.row} answer=${n.answer} added=${n.added.left.length}
          onHover=${l} onPin=${j} onAnswer=${c?M=>d({answer:M}):null} />
        <${rr} maps=${u} net=${$} lam=${g} pieces=${v.left} row=${Math.min(o,u.length-1)}
          isPinned=${n.row!==null&&s===null} />`}
      ${!c&&Xr(x)}
    </section>`}var Xr=t=>t!==null&&b`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the explorer’s server computes them anew.</p>`;var Yr=-.5,Zr=1.5,mt=t=>t.reduce((e,r)=>e+r,0)/t.length;function _t({id:t,name:e,note:r,value:n,learned:a,isSet:o,inherited:s,main:i,onInput:l,onLearned:d}){let c=Math.min(Yr,Math.floor(10*a)/10),h=Math.max(Zr,Math.ceil(10*a)/10),f=u=>(u-c)/(h-c),p=Math.max(c,Math.min(h,n));return b`
    <div class=${`slider ${i?"main":""} ${o?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}${r&&b` <span class="quiet">${r}</span>`}</label>
        <output for=${t}>λ = ${S(n,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${f(0)};--learned-part:${f(a)}`}>
        <input id=${t} type="range" min=${c} max=${h} step="0.01" value=${p}
          aria-valuetext=${`λ ${S(n,2)}; learned ${S(a,2)}`}
          onInput=${u=>l(Number(u.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${o?`learned ${S(a,2)}`:s?"as set above":"as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!o} onClick=${d}
            aria-label=${`${e}: back to ${s?"what is set above":"the learned λ"}`}>
            ${s?"As above":"Learned"}
          </button>
          <button type="button" onClick=${()=>l(0)} aria-label=${`${e}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`}var hr=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function fr({model:t,run:e,place:r,lambdas:n,onChange:a}){if(!e?.learned_lambdas)return b`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let o=e.learned_lambdas,{layer:s,head:i}=r,l=`${s}.${i}`,{all:d,layers:c,heads:h}=n,f=mt(o[s-1]),p=d===null?"on average":"";return b`
    <section class="card lambda" aria-labelledby="lambda-title">
      <div class="card-head">
        <h2 id="lambda-title">Move λ</h2>
        <button type="button" class="link" disabled=${!Y(n)}
          onClick=${()=>a({all:null,layers:{},heads:{}})}>All as learned</button>
      </div>
      <${_t} id="lambda-all" main name="All layers" note=${p} value=${d??mt(o.flat())}
        learned=${mt(o.flat())} isSet=${d!==null}
        onInput=${u=>a({all:u,layers:{},heads:{}})}
        onLearned=${()=>a({...n,all:null})} />
    </section>
    <div class="finer">
      <details open=${Object.keys(c).length+Object.keys(h).length>0||void 0}>
        <summary>One layer, one head</summary>
        <${_t} id="lambda-layer" name=${`Layer ${s}`} value=${c[s]??d??f}
          learned=${f} isSet=${s in c} inherited=${d!==null}
          onInput=${u=>a({...n,layers:{...c,[s]:u}})}
          onLearned=${()=>a({...n,layers:hr(c,s)})} />
        <${_t} id="lambda-head" name=${`Head ${l}`} value=${se(n,r)??o[s-1][i-1]}
          learned=${o[s-1][i-1]} isSet=${l in h} inherited=${d!==null||s in c}
          onInput=${u=>a({...n,heads:{...h,[l]:u}})}
          onLearned=${()=>a({...n,heads:hr(h,l)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${t.lambda_per_token?" The model computes a λ for every token; a slider gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ = ${S(e.recorded_at,2)}.`:""}
      </p>
    </div>`}function ne({name:t,value:e,before:r,title:n}){return b`
    <tr title=${n}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function mr({run:t,right:e,models:r,theme:n}){if(!t)return b`<section class="card predictions" aria-busy="true"><h2>Next token</h2></section>`;if(t.is_recorded===!1)return b`<section class="card predictions">
      <h2>Next token</h2>
      <p class="quiet">What the model predicts with these λ was not recorded in this saved page; <code>diff-transformer explore</code> computes it.</p>
    </section>`;let a=t.next.slice(0,10),o=Math.max(...t.next.flatMap(l=>[l.probability,l.learned_probability]),1e-9),s=l=>({width:`${100*l/o}%`}),i=t.divergence>0;return b`
    <section class="card predictions" aria-labelledby="next-title">
      <div class="card-head">
        <h2 id="next-title">Next token</h2>
        <span class="buttons"><${pe} onSave=${l=>sr(r.left,t,n,l)} /></span>
      </div>
      <table class="bars">
        <caption class="hidden">The ten most likely next tokens, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>token</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${a.map(l=>b`
            <tr key=${l.token}>
              <th scope="row">${H(l.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${s(l.probability)}></span>
                <span class="was" style=${{left:`${100*l.learned_probability/o}%`}}></span>
              </td>
              <td class="value">${q(l.probability,1)}</td>
              <td class="value was-value">${i?q(l.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${i&&b`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${ne} name="KL to the learned λ" value=${`${S(t.divergence)} nats`}
            title="KL(learned ‖ now) of the next token’s distributions" />
          <${ne} name="Loss on the text" value=${S(t.loss)} before=${S(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />
          ${t.answer_probability!==void 0&&b`<${ne} name="Probability of the answer"
            value=${q(t.answer_probability,1)} before=${q(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&b`<${ne} name="Attention on the answer" value=${q(t.answer_share,1)}
            before=${q(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&b`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          <${ne} name="Loss on the text" value=${S(e.loss)} />
          ${e.answer_probability!==void 0&&b`<${ne} name="Probability of the answer" value=${q(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&b`<${ne} name="Attention on the answer" value=${q(e.answer_share,1)} />`}
          <tr><th scope="row">Next token</th><td colspan="2">${e.next.slice(0,2).map(l=>`“${H(l.piece)}” ${q(l.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var de=class extends Error{},De=class{live=!0;hasAddress=!0;constructor(e="api/"){this.address=e}async#e(e,r){let n;try{n=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new de("The explorer does not answer; its command may have ended.")}if(!n.ok){let a=await n.json().catch(()=>({}));throw new de(a.error??`The explorer answered ${n.status}.`)}return n}run=async e=>(await this.#e("run",e)).json();map=async(e,r)=>le(await(await this.#e("map",e)).arrayBuffer(),r);next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json()},ke=class{#e=!1;#t=null;ask(e){if(this.#e){this.#t=e;return}this.#e=!0,e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};function _r({data:t,source:e,view:r,onChange:n,onRefusal:a}){let[o,s]=U(r.text),i=N(0),l=N(null);P(()=>s(r.text),[r.text]);let d=(f,p=null)=>{clearTimeout(l.current),n({text:f,answer:p,added:K,row:null})},c=f=>{s(f),clearTimeout(l.current),l.current=setTimeout(()=>d(f),350)},h=async()=>{try{i.current+=1;let f=await e.example({seed:i.current});d(f.text,f.answer)}catch(f){a({side:"left",message:f.message})}};return b`
    <section class="card text" aria-labelledby="text-title">
      <div class="card-head">
        <h2 id="text-title"><label for="text">Text</label></h2>
        ${e.live&&t.draws_examples&&b`<button type="button" class="link" onClick=${h}>New needles</button>`}
      </div>
      <textarea id="text" rows="4" spellcheck="false" readonly=${!e.live} value=${o}
        onInput=${f=>c(f.target.value)}></textarea>
      ${e.live&&t.examples.length>0&&b`<p class="examples">
        ${t.examples.map(f=>b`<button type="button" class="chip" key=${f.title}
            onClick=${()=>d(f.text,f.answer)}>${f.title}</button>`)}
      </p>`}
      ${!e.live&&b`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var xr={few:48,many:32},Qr=300;function en(){let[t,e]=U(st);return P(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),n=()=>e(st());return r.addEventListener("change",n),()=>r.removeEventListener("change",n)},[]),t}function tn(t,e){let r=t.examples[0],n={...Xt,text:r?.text??"",answer:r?.answer??null};return it(e,n,t.models)}function rn({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let n={layer:1,head:1,number:-1};return r.forEach((a,o)=>a.forEach((s,i)=>{s>n.number&&(n={layer:o+1,head:i+1,number:s})})),{layer:n.layer,head:n.head}}function gr({data:t,source:e,root:r}){let{models:n}=t,a=Object.keys(n),o=en(),s=e.hasAddress?location.hash:"",[i,l]=U(()=>tn(t,s)),d=e.shown?.(i)??i,[c,h]=U({}),[f,p]=U({}),[u,_]=U(null),[m,x]=U(null),g=V(()=>Object.fromEntries(["left","right"].map(y=>[y,{run:new ke,map:new ke}])),[]),$=N({}),w=N(s.length>1?{left:!0,right:!0}:{}),v=Bt(y=>l(M=>({...M,...y instanceof Function?y(M):y})),[]),k=y=>{let M={side:y,text:d.text};return d.added[y].length&&(M.append=d.added[y]),y==="left"&&Y(d.lambdas)&&(M.lambdas=d.lambdas),M},O=y=>d.answer&&(y==="left"||t.shared_vocabulary)?{answer:d.answer}:{};for(let y of a){let M=k(y),Z={...M,...O(y)};P(()=>{if(!d.text.trim())return;let Q=n[y].layers*n[y].heads>64?xr.many:xr.few;g[y].run.ask(async()=>{try{let oe=await e.run(Z);if(_(W=>W?.side===y?null:W),h(W=>({...W,[y]:{heads:W[y]?.heads,...oe}})),g[y].run.waits||oe.heads)return;let he=await e.run({...Z,picture:Q});h(W=>({...W,[y]:he}));let B=w.current[y]?null:rn(he.heads);if(B&&(w.current[y]=!0),!B)return;if(v({[y]:B}),y==="left"&&n.right&&!d.answer&&!w.current.right){let{layers:W,heads:Me}=n.right;v({right:{layer:Math.min(B.layer,W),head:Math.min(B.head,Me)}})}}catch(oe){_({side:y,message:oe.message})}})},[JSON.stringify(Z)]);let ue=d[y];P(()=>{d.text.trim()&&g[y].map.ask(async()=>{try{let{append:Q,...oe}=M,he=JSON.stringify([oe,ue]),B=$.current[y],Me=B?.key===he&&B.append.every((Fe,wr)=>Q?.[wr]===Fe)&&Q?.length>B.append.length?B.maps.length:0,xt={...M,layer:ue.layer,head:ue.head},gt=await e.map(Me?{...xt,first_row:Me}:xt,B?.maps);$.current[y]={key:he,append:Q??[],maps:gt},p(Fe=>({...Fe,[y]:{...gt,head:ue}}))}catch(Q){_({side:y,message:Q.message})}})},[JSON.stringify([M,ue])])}let A=c.left,D=A?.tokens.length??0,L=d.added.left.length?D-1:d.answer?.query??D-1,R=Math.max(0,Math.min(m??d.row??L,D-1));P(()=>{r.dataset.theme=o,r.dataset.ready=String(!!(A?.heads&&f.left))}),P(()=>{if(!e.hasAddress)return;let y=setTimeout(()=>history.replaceState(null,"",$e(d)),Qr);return()=>clearTimeout(y)},[$e(d)]),P(()=>{if(!e.hasAddress)return;let y=()=>l(M=>it(location.hash,M,n));return addEventListener("hashchange",y),()=>removeEventListener("hashchange",y)},[]);let j=y=>M=>{w.current[y]=!0,v({[y]:M})},z=y=>v({lambdas:y});return b`
    <header class="top">
      ${t.pairs?.length>1&&b`<nav class="pairs" aria-label="Models">
        <span class="quiet">Models</span>
        ${t.pairs.map(({name:y,address:M})=>b`<a key=${y} href=${M}
            aria-current=${location.pathname===M?"page":null}>${y}</a>`)}
      </nav>`}
      <h1>See the noise cancel</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the text twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        What both looks share is noise, and it cancels; what only the first one sees is left.${" "}
        <strong>Move λ</strong> and watch what the model attends to and what it would write next.
      </p>
      ${n.left.note&&b`<p class="note">${n.left.note}</p>`}
    </header>
    ${u&&b`<p class="refusal" role="alert">${u.message}</p>`}
    <main class="layout">
      <div class="controls">
        <${fr} model=${n.left} run=${A} place=${d.left} lambdas=${d.lambdas} onChange=${z} />
        <${mr} run=${A} right=${c.right} models=${n} theme=${o} />
        <${_r} data=${t} source=${e} view=${d} onChange=${v} onRefusal=${_} />
        <${Qt} models=${n} runs=${c} view=${d} source=${e} question=${k}
          onChange=${v} onRefusal=${_} />
      </div>
      <div class="pictures">
        <${ur} models=${n} runs=${c} maps=${f} view=${d} theme=${o} row=${R} hovered=${m}
          shared=${t.shared_vocabulary} onHover=${x} onChange=${v} live=${e.live} hasAddress=${e.hasAddress} />
        <div class="grids">
          ${a.map(y=>b`<${lr} key=${y} side=${y} model=${n[y]} run=${c[y]}
              chosen=${d[y]} theme=${o} onChoose=${j(y)} />`)}
        </div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${a.map(y=>`${n[y].name}: ${n[y].label}, ${nn(n[y])}`).join("; ")}.
      </p>
    </footer>
  `}function nn({layers:t,heads:e,kv_heads:r}){let n=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${n}`}var on=(t,e)=>t.reduce((r,n)=>Math.abs(n.value-e)<Math.abs(r.value-e)?n:r),br=t=>t.reduce((e,r)=>e+r,0),Ue=class{live=!1;hasAddress=!0;#e=new Map;constructor({recorded:e,models:r,examples:n}){this.recorded=e,this.models=r,[this.example]=n}shown(e){let r=Object.fromEntries(Object.entries(this.recorded).map(([o,{tokens:s,runs:i}])=>{let l=s.slice(s.length-i.length+1);return[o,l.slice(0,e.added[o].length)]})),{text:n,answer:a}=this.example;return{...e,text:n,answer:a,added:Y(e.lambdas)?K:{...K,...r}}}async run({side:e,append:r=[],lambdas:n,answer:a,picture:o}){let{tokens:s,pieces:i,learned_lambdas:l,runs:d,moved:c}=this.recorded[e],h=s.length-d.length+1+r.length,f={tokens:s.slice(0,h),pieces:i.slice(0,h),learned_lambdas:l,...d[r.length]};if(n){let{all:p,layers:u,heads:_}=n,m=Object.entries({...p===null?{}:{all:p},...u,..._}),[x,g]=m[0];if(m.length>1||!(x in c))f.is_recorded=!1;else{let $=on(c[x],g);Object.assign(f,$.run,{recorded_at:$.value})}}return o&&(f.heads=this.#t(e,h,n,a,o)),f}async map({side:e,append:r=[],layer:n,head:a}){let{tokens:o,runs:s}=this.recorded[e];return ct(this.#r(e,n,a),o.length-s.length+1+r.length)}async next({side:e,append:r=[]}){let{tokens:n,runs:a}=this.recorded[e];return{token:n[n.length-a.length+1+r.length]}}#t(e,r,n,a,o){let{layers:s,heads:i,subtracts:l}=this.models[e],d=Math.min(o,r),c=new Int8Array(s*i*d*d),h={removed:l?[]:null,on_answer:a?[]:null,picture_size:d,pictures:c};for(let f=1,p=0;f<=s;f++){h.removed?.push([]),h.on_answer?.push([]);for(let u=1;u<=i;u++,p++){let _=ct(this.#r(e,f,u),r),m=qe(_,n?se(n,{layer:f,head:u}):null);if(l){let w=0;for(let v=0;v<m.length;v++)w+=Math.max(0,Math.min(_.first[v],_.first[v]-m[v]));h.removed.at(-1).push(w/r)}if(a){let w=G(m,a.query).map(Math.abs);h.on_answer.at(-1).push(br(w.subarray(a.begin,a.end))/(br(w)||1))}let x=ve(r,m),$=dt(m,r,d).map(w=>Math.round(127*Math.sign(w)*Math.sqrt(Math.min(1,Math.abs(w)/x))));c.set($,p*d*d)}}return h}#r(e,r,n){let a=`${e} ${r}.${n}`;return this.#e.has(a)||this.#e.set(a,le(Le(this.recorded[e].maps[`${r}.${n}`]))),this.#e.get(a)}};var Be=class{live=!0;hasAddress=!1;#e=new Map;#t=0;constructor(e){this.model=e,e.on("msg:custom",({id:r,error:n,answer:a},o)=>{let s=this.#e.get(r);s&&(this.#e.delete(r),n?s.reject(new de(n)):s.resolve(o?.length?an(o[0]):a))})}#r(e,r){let n=`${this.#t++} ${Math.random()}`;return new Promise((a,o)=>{this.#e.set(n,{resolve:a,reject:o}),this.model.send({id:n,name:e,question:r})})}run=e=>this.#r("run",e);map=async(e,r)=>le(await this.#r("map",e),r);next=e=>this.#r("next",e);example=e=>this.#r("example",e)},an=t=>t instanceof ArrayBuffer?t:t.buffer.slice(t.byteOffset,t.byteOffset+t.byteLength);function vr(t,e,r){t.classList.add("explorer"),Pe(b`<${gr} data=${e} source=${r} root=${t} />`,t)}function sn({model:t,el:e}){return e.addEventListener("focusin",({target:r})=>r.dataset.lmSuppressShortcuts="true"),vr(e,t.get("described"),new Be(t)),()=>Pe(null,e)}var _a={render:sn},$r=document.getElementById("explorer-data");if($r){let t=JSON.parse($r.textContent),e=t.mode==="recorded"?new Ue(t):new De;vr(document.getElementById("explorer"),t,e)}export{_a as default};
